"""The command `fourfold`: one file a command."""
