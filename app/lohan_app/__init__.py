"""The service: web application, database, queue and workers around the `lohan` engine."""

from lohan import __version__ as __version__
