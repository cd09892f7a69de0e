"""One append: a state machine decides, a driver performs."""
