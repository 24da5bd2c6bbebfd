"""What is answered to a request for a path that is no route."""
