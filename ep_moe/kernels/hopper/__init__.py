"""Device code in Gluon for Hopper (sm_90): grouped GEMMs with a warp that loads and two warp groups that multiply."""
