"""Settings of both planes, and how they are resolved. Knows neither plane."""
