"""The endpoint that agents call: addresses, wire forms, conversations, its process and its port."""
