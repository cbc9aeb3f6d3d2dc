"""The whole stack over real sockets, and one real model: the named cases, end to end."""
