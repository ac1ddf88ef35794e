"""`make install-test`: the image built and the chart's pods run, without a cluster and without a daemon."""
