"""Publishers for programs that are no shards: outputs, transactions, and their commits."""
