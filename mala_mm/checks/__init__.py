"""What can be found before a run starts: in the environment, the config and the data."""
