"""Ray actors, launcher, HTTP gateway, metrics, console and command line."""
