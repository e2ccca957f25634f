"""The testing kit: scripted engines, a live gateway, conformance suites."""
