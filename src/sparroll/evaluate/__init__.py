"""How often a policy is right, with an interval that says how sure that is."""
