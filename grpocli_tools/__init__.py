"""What looks at runs, configs and machines: the commands of grpocli that train nothing."""
