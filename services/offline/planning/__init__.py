"""Planning by the cost model: cluster sizes, explanations of choices, and predictions beside published times."""
