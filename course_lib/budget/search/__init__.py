"""Search for the recipes that fit a memory budget.

Each file decides one question, and calls only files to its right and below:

    fit: arguments of the search, and the table of the result
    families: combinations of techniques that are searched
    best_numbers, candidates: amounts of each technique that are tried
    lower_bounds, estimate_cache: bounds without an estimate, and the estimates themselves
    extrapolation, optimizer_updates: estimates that are composed from steps with few blocks
"""
