"""Sizes clusters with the cost model, explains choices, and sets its predictions beside published times."""
