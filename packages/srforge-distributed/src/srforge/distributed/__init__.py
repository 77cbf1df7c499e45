"""Distributed training as an environment: start-up, sharding, gradient sync, metrics, gates and seeding."""
