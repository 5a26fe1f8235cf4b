"""What the vendor's libraries take: an analytic model, fitted to published measurements."""
