"""The very code that trains, on one rank of any world, without weights, devices or the other ranks."""
