"""Training's commands: `lightningrl init | try | doctor | train | serve | export | recipe | eval | certify | branch |
xray | rescore`."""
