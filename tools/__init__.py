"""What outputs act on."""
