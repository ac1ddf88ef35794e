"""Tables and figures of the papers beside predictions of the cost model."""
