"""Commands on journals, one file for each verb."""
