"""Made of _async, but for transport.py."""
