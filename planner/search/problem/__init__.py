"""Problem of a search: the request, its limits, and tables read from the cost model."""
