"""Measures how fast a machine is at what the engine does; the result is a `lohan.hardware.profile.HardwareProfile`."""
