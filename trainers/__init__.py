"""What learns from events: the bundled learner and one adapter per outside trainer."""
