"""What tests are made of: scripted engines, a live gateway, conformance suites."""
