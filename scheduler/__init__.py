"""The Conductor: global scheduling as a pure state machine."""
