"""The checker: compares state across ranks, locates differences, repairs; known answers and audits of devices."""
