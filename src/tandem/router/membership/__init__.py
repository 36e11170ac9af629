"""The members of a cluster, from flags, announcements and DNS."""
