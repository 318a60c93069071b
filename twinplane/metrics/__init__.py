"""What both planes' metrics stand on: the endpoint, histograms, and families of numbers."""
