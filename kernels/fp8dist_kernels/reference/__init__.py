"""Each kernel in plain torch. It runs anywhere, and says what is right."""
