class Search:
    pass
