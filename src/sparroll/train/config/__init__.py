"""What a training run can be told, and how a TOML file becomes a checked configuration."""
