"""A local web application on one or two logs; it reads them and decides nothing."""
