"""What several verbs share: options.py has the options with the same name and meaning, and how the help is laid out;
named.py makes the objects that options name; common.py has what verbs do alike."""
