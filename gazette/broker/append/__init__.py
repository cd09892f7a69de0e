"""One append: decided by a state machine, performed by a driver."""
