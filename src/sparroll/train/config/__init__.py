"""What a training run can be told, field by field with its consequence, and how a TOML file with overrides becomes a
checked configuration. Every mistake is found here or at the start of the run, before anything is computed."""
