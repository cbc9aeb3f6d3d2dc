"""The disk tier of a pool node: append-only extent files. See `docs/adr/0007-disk-tier.md`."""
