"""Before you run: what a step of a model on a cluster would take, layout by layout. Nothing here needs torch."""
