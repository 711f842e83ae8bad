"""Predicts the norm that AdamW will reach, without a run.

This folder has the random-walk model, its calibration, and recipes that convert settings between
methods. Nothing in it may know about training.
"""

from normcontrol.groups.classes import TensorClass, classes_of
from normcontrol.predict.calibration import Constant, Constants, calibrate
from normcontrol.predict.free_growth import growth
from normcontrol.predict.learning_rates import LearningRate, learning_rates
from normcontrol.predict.prediction import ClassPrediction, Prediction
from normcontrol.predict.random_walk import Weights, adamc, adamw, decay_for

__all__ = [
    "ClassPrediction",
    "Constant",
    "Constants",
    "LearningRate",
    "Prediction",
    "TensorClass",
    "Weights",
    "adamc",
    "adamw",
    "calibrate",
    "classes_of",
    "decay_for",
    "growth",
    "learning_rates",
]
