"""Problems made from a seed, with answers that a program checks."""
