"""Every figure of the README, each by one command."""
