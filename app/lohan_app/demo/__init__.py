"""The demonstration: starts the appliance, and uses it over REST as anybody could. `python -m lohan_app.demo`, or `make demo`."""
