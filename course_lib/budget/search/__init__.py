"""Search for the recipes that fit a memory budget.

Each file calls only files after it in this list:

    fit: arguments of the search, and the table of the result
    families: combinations of techniques that are searched
    best_numbers, candidates: values of each technique's fields that are tried
    lower_bounds, estimate_cache: lower bounds on memory and cost, and a cache of estimates
    extrapolation, optimizer_updates: estimates that are composed from steps with few blocks
"""
