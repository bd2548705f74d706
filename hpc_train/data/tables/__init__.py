"""Tables: their columns, the features that are made of them, and the rows of prepared folders."""
