"""The 15 common corruptions of CIFAR-10-C and ImageNet-C (Hendrycks and Dietterich, 2019).

Each module holds a family: functions of pixels from 0 to 255, their random numbers and the
constants of a severity. `corruption` turns them into perturbations.
"""
