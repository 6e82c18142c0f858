"""What is known of Hugging Face models: their modules, roles, files and initialisation. No collectives."""
