"""Who may move the schedule. Pure decisions on what a step measured, for any trainer; no engine runs here."""
