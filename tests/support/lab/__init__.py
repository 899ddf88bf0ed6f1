"""The fault lab: the example job with every switch of the library, and faults to plant. For tests and pages."""
