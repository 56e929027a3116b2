"""What lockstep costs on GPUs: trainings beside loops by hand and other frameworks, and calls beside torch's."""
