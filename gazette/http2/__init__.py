"""gRPC over our own HTTP/2: its clients, and the parts that both ends of a connection share."""
