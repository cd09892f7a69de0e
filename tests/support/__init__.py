"""Parts of tests that several directories share: brokers, stores, networks and clocks to test with."""
