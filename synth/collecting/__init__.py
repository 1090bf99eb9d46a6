"""Running a plan on GPUs: workers that time, a journal that keeps, measurements files in the end."""
